"""kvflow as a KV connector of vLLM 0.32: `--kv-transfer-config '{"kv_connector": "KvflowConnector", ...}'`.

vLLM makes the connector twice. In the scheduler's process, `scheduler` decides from vLLM's requests what is to move; in
each worker's process, `worker` has the rank. What one tells the other goes with vLLM's steps (`metadata`). `connector`
is the class that vLLM sees, and `dialect` what routers see.
"""
