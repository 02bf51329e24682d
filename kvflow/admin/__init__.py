"""How a person or a probe asks a running rank: one line of JSON each way, over a Unix socket (docs/operating.md).

`messages` has the requests and answers, `places` the directories that sockets are in, `server` the socket of a rank,
and `client` what `kvflow status` and the other commands use. What a rank answers is in `kvflow.answers`.
"""
