"""The policy as an HTTP server that speaks the protocols of OpenAI and Anthropic and records every token for the loss.

    HTTP ─► server.py ─► chat | completions | responses | messages ─► answers.py ─► generate(GenerationRequest)
                          (request and response of one protocol)        │
                                                            recorder.py ◄┘  turns of the session, token by token

Sessions and recorder need no further package; `server.py` needs the extra `serve`.
"""
