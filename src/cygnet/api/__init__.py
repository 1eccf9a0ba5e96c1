"""OpenAI-compatible HTTP over an `EngineClient`.

    app.create_app        the ASGI application
    server.serve          runs it: loopback by default, SIGTERM drains
    card.ModelCard        what the server says about the model it serves

A request's way: `gateway` (id, key, log line) → `endpoint` (body, disconnect watch) → `chat` or `completions`
(schema, prompt, sampling) → `generation` (engine, fan-out) → `output` (text, stop strings) → `sse` or one JSON body.

Fields of a request that nobody knows are accepted and named in the response header `x-ignored-fields`; fields that
would change the answer and are not supported are refused with 400 (see `fields`).
"""
