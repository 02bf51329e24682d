"""`kvflow demo`: a language model whose decode process goes on from pages that another process computed."""
