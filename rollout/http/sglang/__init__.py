"""The paths of SGLang's server that the trainers slime, miles and AReaL call, and that sglang-router calls. Off unless
`HttpConfig.sglang` is set.

| module     | owns                                                                                                  |
|------------|-------------------------------------------------------------------------------------------------------|
| `fields`   | the fields of `/generate`, and their translation to sampling parameters                               |
| `answers`  | the form of answers and streams                                                                       |
| `generate` | the handler of `/generate`, and the names of open requests                                            |
| `weights`  | pulling a weight version, and committing it                                                           |
| `control`  | abort, pause, memory, the prefix cache; the paths that are refused                                    |
| `info`     | what routers and trainers ask about the server                                                        |
| `routes`   | the list of paths                                                                                     |

Promises: a request gives the same tokens and log-probs as the same request on any other path, bit for bit. A field that
this server does not support is refused with an error that names the field. A commit makes the worker serve exactly the
version that was pulled. If the commit fails, the worker keeps its weights. No path deserializes pickles. A path of
SGLang that needs pickles is refused, with an error that names the path to use instead.
"""
