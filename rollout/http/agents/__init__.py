"""Sessions of agents over HTTP, in the APIs that agents speak.

| module        | owns                                                                                   |
|---------------|----------------------------------------------------------------------------------------|
| `call`        | the form of requests that all APIs share                                               |
| `chat`        | OpenAI's chat completions                                                              |
| `messages`    | Anthropic's messages                                                                   |
| `responses`   | OpenAI's responses                                                                     |
| `registry`    | the open sessions, their capabilities and bounds                                       |
| `endpoints`   | the handlers of the paths below `/sessions`                                            |
"""
