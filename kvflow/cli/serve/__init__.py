"""Inference engines as child processes: a prefill server, a decode server, and a proxy in front of them."""
