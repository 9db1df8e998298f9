"""How much each tenant has been served, so that none of them is served at others' cost.

The virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024):
whoever was served least is next. Two tenants that both want more than they get are never further
apart than what prompts and the requests that run take.
"""

from __future__ import annotations

from collections import Counter

# What a token of the prompt counts, when it is computed for the first time, and one of the answer.
PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
# Steps' worth of tokens that a tenant may get before others when it comes back: a prompt that is
# short, as prompts go.
CREDIT_STEPS = 4

Tenant = str | int | None
"""An API key's, or where there are none a flow: a class of client addresses."""


class TenantCounters:
    """A counter of weighted tokens for each tenant; None is one, too.

    A tenant competes as long as it has requests that were not computed up to their last token yet,
    waiting or in steps. One that begins to compete is lifted to the least served of those that do
    (if nobody does: to the one that did last), or idle tenants would save up and then keep
    everybody else waiting. A little they may save, so that one that asks now and then is answered
    as if it were alone.

    Args:
        credit: weighted tokens by which one that begins to compete may be behind the others.
    """

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._served: dict[Tenant, int] = {}
        self._live: Counter[Tenant] = Counter()
        """Unfinished requests."""
        self._competing: Counter[Tenant] = Counter()
        """Those of them that compete."""
        self._last = 0
        """What the tenant had been served that ceased to compete last."""

    @property
    def several_compete(self) -> bool:
        """Whether there is anything to share."""
        return len(self._competing) > 1

    def arrive(self, tenant: Tenant) -> None:
        """A request comes, and competes."""
        if tenant not in self._competing:
            least = min((self._served[t] for t in self._competing), default=self._last)
            least -= self._credit
            self._served[tenant] = max(self._served.get(tenant, 0), least)
            # Those that come back would be lifted to at least this.
            for idle in [t for t, served in self._served.items() if served < least]:
                if idle not in self._live:
                    del self._served[idle]
        self._live[tenant] += 1
        self._competing[tenant] += 1

    def cease(self, tenant: Tenant) -> None:
        """A request competes no more."""
        self._last = self._served[tenant]
        self._competing[tenant] -= 1
        if not self._competing[tenant]:
            del self._competing[tenant]

    def leave(self, tenant: Tenant) -> None:
        """A request, which does not compete, has ended."""
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Counts weighted tokens."""
        self._served[tenant] += tokens

    def rank(self, tenant: Tenant) -> tuple[int, int]:
        """The smallest one's turn it is: who was served least, then who has the fewest requests."""
        return self._served[tenant], self._live[tenant]
