"""Long random runs of the `Shadow`, for situations that short ones seldom meet."""

from random import Random

from kv.shadow import Shadow


def random_walk(shadow: Shadow, seed: int, steps: int, *, letters: int = 2, max_tokens: int = 40) -> None:
    """Drive `shadow` with random requests that share prefixes."""
    random = Random(seed)
    history: list[list[int]] = [[0]]
    for _ in range(steps):
        waiting = [r for r in shadow.requests.values() if not r.active]
        active = shadow.active()
        choice = random.random()
        if choice < 0.15 and len(shadow.requests) < 6:
            base = random.choice(history)
            tail = [random.randrange(letters) for _ in range(random.randint(1, 12))]
            tokens = (base[: random.randint(0, len(base))] + tail)[: max_tokens - 4]
            history.append(tokens)
            history = history[-12:]
            shadow.add(tokens)
        elif choice < 0.35 and waiting:
            shadow.admit(random.choice(waiting), swa_room=random.randint(1, 3))
        elif choice < 0.8 and active:
            request = random.choice(active)
            if request.kv.num_computed == len(request.tokens):
                if len(request.tokens) < max_tokens and random.random() < 0.7:
                    request.tokens.append(random.randrange(letters))
                else:
                    history.append(request.tokens)
                    shadow.free(request)
                    continue
            if not shadow.run(request, random.randint(1, shadow.max_chunk)):
                shadow.free(random.choice(shadow.active()), requeue=True)
        elif choice < 0.86 and active:
            shadow.free(random.choice(active), requeue=random.random() < 0.5)
        elif choice < 0.92 and active:
            request = random.choice(active)
            shadow.want(request, random.randint(0, len(request.tokens) // shadow.size))
        elif choice < 0.95 and active:
            shadow.overask(random.choice(active))
        elif choice < 0.955:
            shadow.flush()
