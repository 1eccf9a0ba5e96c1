"""The engine: which tokens run in the next step. Pure; `runtime/` runs them."""
