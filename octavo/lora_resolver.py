"""Interface of resolvers, which find adapters that a server does not know by their names.

The names are vLLM's (`vllm.lora.resolver`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set

from octavo.lora_request import LoRARequest


class LoRAResolver(ABC):
    """Finder of adapters that requests name as their model, such as in a store of files.

    A package declares a class without arguments, or an object, as an entry point of the group
    `octavo.lora_resolvers`; the setting `lora_resolvers` turns it on by the entry point's name.
    """

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return an adapter; None: this resolver does not know it.

        Args:
            base_model_name: name of the served model.
            lora_name: value of `model` in a request: printable, 1 to 256 characters, and otherwise
                what a client wrote.
        """


class _Registry:
    """Resolvers of this process by their names."""

    def __init__(self) -> None:
        self.resolvers: dict[str, LoRAResolver] = {}

    def get_supported_resolvers(self) -> Set[str]:
        """Return the names of the resolvers."""
        return self.resolvers.keys()

    def register_resolver(self, resolver_name: str, resolver: LoRAResolver) -> None:
        """Add a resolver; it replaces another one of the same name."""
        self.resolvers[resolver_name] = resolver

    def get_resolver(self, resolver_name: str) -> LoRAResolver:
        """Return a resolver.

        Raises:
            KeyError: no resolver has this name.
        """
        if resolver_name not in self.resolvers:
            raise KeyError(f"There is no resolver {resolver_name!r}.")
        return self.resolvers[resolver_name]


LoRAResolverRegistry = _Registry()
