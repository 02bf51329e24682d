"""A prefill and a decode engine in processes of their own, small enough to be killed and checked."""
