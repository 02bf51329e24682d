"""Two processes that move the same pages through kvflow and through the bare transport, in turn."""
