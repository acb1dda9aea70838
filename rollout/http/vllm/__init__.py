"""The paths of vLLM's server that trainers call to update weights, and the paths that SkyRL adds to vLLM's server. Off
unless `HttpConfig.vllm` is set. The paths that pause and sleep, which also have vLLM's names, belong to `lifecycle` and
are always served.

| module   | owns                                                                                            |
|----------|-------------------------------------------------------------------------------------------------|
| `fields` | the fields of requests, and the paths that are refused                                          |
| `phases` | the update in phases: fetch, start, update, finish                                              |
| `routes` | the list of paths                                                                               |

vLLM 0.32 updates weights in phases: `/init_weight_transfer_engine` once, then `/start_weight_update`, `/update_weights`
and `/finish_weight_update` for each version. For each version, SkyRL 0.4 calls `/fetch_weights` before
`/start_weight_update`.

Promises: after an update, the worker serves either the whole new version or its previous weights. No path deserializes
pickles or joins an NCCL group. A request that needs pickles or an NCCL group is refused with an error that names the
alternative.
"""
