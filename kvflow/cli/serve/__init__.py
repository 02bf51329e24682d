"""Inference engines as child processes: a prefill server, a decode server, and a router in front of them."""
