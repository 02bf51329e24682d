"""`kvflow demo`: a language model whose decode process continues from pages that another process computed."""
