"""The paths of the Tinker API that sample and score, for the package `tinker`. Off unless `HttpConfig.tinker` is set.

| module      | owns                                                                                                 |
|-------------|------------------------------------------------------------------------------------------------------|
| `fields`    | the fields of `asample`, and their translation to a request                                          |
| `targets`   | `target_prompt_logprobs`: the token ids to score, dense or in CSR form                               |
| `answers`   | answers in protobuf                                                                                  |
| `promises`  | the open sessions, and the promises: requests that run while their clients poll                      |
| `endpoints` | the handlers                                                                                         |
| `routes`    | the list of paths                                                                                    |

Guarantees: a request gives the same tokens and log-probs as the same request on any other path, bit for bit. An
unsupported field is refused with an error that names the field. Every path that trains is refused. Each accepted
request has exactly one outcome. The client can read this outcome more than once. If a client sends the same request
again, no new samples are generated. The number of unread requests and the memory of their outcomes are bounded.
"""
