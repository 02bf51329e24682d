"""Measurements that users can make of their own fabric: kvflow, alternating with the transport that it uses."""
