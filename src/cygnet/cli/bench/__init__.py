"""`cygnet bench`: a load generator for OpenAI-compatible servers.

workload, traces  ->  sessions of turns      what to ask, and when; pure
client            ->  one request, timed     over connection: HTTP/1.1 with little overhead of its own
load              ->  all sessions           closed loop (concurrency) or open loop (arrival times)
stats, report     ->  percentiles, JSON      TTFT, TPOT, ITL, E2E as vLLM's bench defines them
"""
