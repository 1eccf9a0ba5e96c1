"""`cygnet bench`: a load generator for OpenAI-compatible servers.

workload, traces  ->  tokens and sessions    what to ask, and when; sessions are shared with the simulator
client            ->  one request, timed     over connection: HTTP/1.1 with little overhead of its own
load              ->  all sessions           closed loop (concurrency) or open loop (arrival times)
stats, report     ->  percentiles, JSON      TTFT, TPOT, ITL, E2E as vLLM's bench defines them
"""
