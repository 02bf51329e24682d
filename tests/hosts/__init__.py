"""Tests on two hosts: network namespaces with a router between them, so that transports use real TCP."""
