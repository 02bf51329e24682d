"""Tests on two hosts: network namespaces with a router between them, over which transports use real TCP."""
