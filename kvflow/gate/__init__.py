"""Decides about everything that comes from outside this process. Pure: the time is passed in.

`sizes` says how long a message may be, `rates` how many may come and wait to be parsed, `shares` how much each sender
may keep, `connections` which connections are cut, `identity` and `capability` who may say what, `hellos` what a
handshake may take, `grants` which page tables are asked for, and `listings` how much of a directory is read.
"""
