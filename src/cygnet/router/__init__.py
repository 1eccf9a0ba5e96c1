"""Which worker serves a request: prefix index, loads, policies, queue, health. `runtime/` carries decisions out."""
