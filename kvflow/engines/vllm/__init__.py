"""kvflow as a KV connector of vLLM 0.32: `--kv-transfer-config '{"kv_connector": "KvflowConnector", ...}'`.

vLLM creates the connector in two roles. In the scheduler's process, `scheduler` decides from vLLM's requests what to
move; in each worker's process, `worker` holds the rank. They exchange messages with vLLM's steps (`metadata`).
`connector` is the class that vLLM loads, and `dialect` defines what routers see.
"""
