"""Counters of the tokens of each tenant, by which the scheduler divides tokens fairly.

They are the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024): the tenant with the lowest counter is next. The counters of two tenants with constant
demand never differ by more than the cost of prompts and running requests.
"""

from __future__ import annotations

from collections import Counter

# Weights of a token of the prompt, when it is computed for the first time, and of the answer.
PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
# Weight of a token of an encoder, such as a patch of a picture, when it is computed for the first
# time. A step's limit of encoder tokens is its limit of tokens (`encoders.py`), so they weigh the
# same: one step's worth of pictures costs as much as one step's worth of prompts.
ENCODER_WEIGHT = 1
# Number of steps of which a returning tenant may get the tokens before other tenants: enough for a
# short prompt.
CREDIT_STEPS = 4

Tenant = str | int | None
"""Name of an API key's tenant or, without API keys, a flow: a class of client addresses."""


class TenantCounters:
    """A counter of weighted tokens for each tenant; None is also a tenant.

    A tenant competes while it has requests, waiting or in steps, with uncomputed tokens. The
    counter of a tenant that begins to compete is raised to the lowest counter of the competing
    tenants, minus `credit`. If no tenant competes, it is raised to that of the last one that did,
    minus `credit`. Otherwise an idle tenant would save up tokens and later block all others. The
    credit lets a tenant with occasional requests get answers as if it were alone.

    Args:
        credit: weighted tokens by which the counter of a tenant that begins to compete may be
            lower than the others.
    """

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._served: dict[Tenant, int] = {}
        self._live: Counter[Tenant] = Counter()
        """Number of unfinished requests of each tenant."""
        self._competing: Counter[Tenant] = Counter()
        """Number of competing requests of each tenant."""
        self._last = 0
        """Counter of the tenant of the last request that ceased to compete."""

    @property
    def several_compete(self) -> bool:
        """True if several tenants compete."""
        return len(self._competing) > 1

    def arrive(self, tenant: Tenant) -> None:
        """Count a request that arrives and competes."""
        if tenant not in self._competing:
            least = min((self._served[t] for t in self._competing), default=self._last)
            least -= self._credit
            self._served[tenant] = max(self._served.get(tenant, 0), least)
            # Their counters would be raised to at least this when they return.
            for idle in [t for t, served in self._served.items() if served < least]:
                if idle not in self._live:
                    del self._served[idle]
        self._live[tenant] += 1
        self._competing[tenant] += 1

    def cease(self, tenant: Tenant) -> None:
        """Count a request that no longer competes."""
        self._last = self._served[tenant]
        self._competing[tenant] -= 1
        if not self._competing[tenant]:
            del self._competing[tenant]

    def leave(self, tenant: Tenant) -> None:
        """Count the end of a request that does not compete."""
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Add weighted tokens to a tenant's counter."""
        self._served[tenant] += tokens

    def served(self, tenant: Tenant) -> int:
        """Return the counter of a tenant with unfinished requests."""
        return self._served[tenant]

    def rank(self, tenant: Tenant) -> tuple[int, int]:
        """Return the sort key of a tenant: its counter, then its unfinished requests.

        The tenant with the smallest key is served next.
        """
        return self._served[tenant], self._live[tenant]
