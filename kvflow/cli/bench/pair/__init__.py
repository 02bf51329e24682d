"""Two processes that move the same pages in turn: through kvflow, and through the bare transport below it."""
