"""Simulator and planner: the real scheduler and cache on an imagined machine.

model_facts, model_config, model_table  ->  what a model weighs, caches and computes
hardware, cost                          ->  how long a step of it takes
planner                                 ->  what fits where
sessions, traces, agents, prompts       ->  what is asked
scenario, assembly                      ->  who is asked: workers, tiers, router, roles, faults
events, steps, worker, cluster, results ->  what comes of it
"""
