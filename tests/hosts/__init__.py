"""Tests over two hosts: network namespaces with a router between them, so that transports take real TCP."""
