"""/v1/conversations: items that several responses share."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import NotFoundError, RequestError
from octavo.server import answers, response_answers
from octavo.server.body import read_model
from octavo.server.errors import show
from octavo.server.middleware import context_of
from octavo.server.response_items import Item, with_ids, with_other_ids
from octavo.server.responses_schema import (
    ConversationBody,
    ConversationItemsBody,
    ConversationUpdateBody,
)
from octavo.server.state import ServerState, state_of
from octavo.server.stored import (
    StoredConversation,
    item_list,
    items_nbytes,
    load,
    load_for,
    new_id,
    not_found,
    save,
    store_of,
)

MAX_ITEMS = 4096


async def create_conversation(request: Request) -> Response:
    """Create a conversation, with its first items."""
    state = state_of(request)
    body = await read_model(request, ConversationBody, state.config.max_request_bytes)
    store, name = store_of(state, "This address"), new_id("conv")
    items = _new_items(body.items or [], [], name, 0)
    conversation = StoredConversation(int(time.time()), body.metadata or {}, items, len(items))
    await state.get_engine()
    await save(store, context_of(request).api_key, name, conversation)
    return _respond(name, conversation)


async def get_conversation(request: Request) -> Response:
    """Return a conversation, without its items."""
    name, conversation = await _named(request)
    return _respond(name, conversation)


async def update_conversation(request: Request) -> Response:
    """Replace the metadata of a conversation."""
    state = state_of(request)
    body = await read_model(request, ConversationUpdateBody, state.config.max_request_bytes)
    async with state.objects.changing:
        name, conversation = await _named(request)
        conversation.metadata = body.metadata or {}
        await save(state.objects, context_of(request).api_key, name, conversation)
    return _respond(name, conversation)


async def delete_conversation(request: Request) -> Response:
    """Delete a conversation; its responses stay."""
    state = state_of(request)
    async with state.objects.changing:
        name, _ = await _named(request)
        await state.objects.delete(context_of(request).api_key, name)
    return answers.respond(answers.Deleted(id=name, object="conversation.deleted", deleted=True))


async def create_items(request: Request) -> Response:
    """Append items to a conversation."""
    state = state_of(request)
    body = await read_model(request, ConversationItemsBody, state.config.max_request_bytes)
    async with state.objects.changing:
        name, conversation = await _named(request)
        new = _new_items(body.items, conversation.items, name, conversation.num_created)
        _check_room(conversation, new, state.config.max_request_bytes)
        conversation.items += new
        conversation.num_created += len(new)
        await save(state.objects, context_of(request).api_key, name, conversation)
    return answers.respond(
        response_answers.ItemList(
            object="list",
            data=new,
            first_id=new[0]["id"],
            last_id=new[-1]["id"],
            has_more=False,
        )
    )


async def list_items(request: Request) -> Response:
    """Return a page of the items of a conversation."""
    _, conversation = await _named(request)
    return item_list(request, conversation.items)


async def get_item(request: Request) -> Response:
    """Return an item of a conversation."""
    _, conversation = await _named(request)
    return answers.respond(_item(request, conversation))


async def delete_item(request: Request) -> Response:
    """Delete an item of a conversation; return the conversation."""
    state = state_of(request)
    async with state.objects.changing:
        name, conversation = await _named(request)
        conversation.items.remove(_item(request, conversation))
        await save(state.objects, context_of(request).api_key, name, conversation)
    return _respond(name, conversation)


async def load_conversation(request: Request, name: str) -> StoredConversation:
    """Return a conversation that has room for more items.

    Raises:
        NotFoundError: the key has no conversation of this name.
        RequestError: it is full.
    """
    conversation = await load_for(request, name, StoredConversation)
    if conversation is None:
        raise not_found("Conversation", name)
    _check_room(conversation, [], state_of(request).config.max_request_bytes)
    return conversation


async def append_items(
    state: ServerState, api_key: str | None, name: str, items: Sequence[Item]
) -> None:
    """Append the items of a response to a conversation, unless it was deleted meanwhile."""
    async with state.objects.changing:
        conversation = await load(state.objects, api_key, name, StoredConversation)
        if conversation is not None:
            conversation.items += items
            await save(state.objects, api_key, name, conversation)


async def _named(request: Request) -> tuple[str, StoredConversation]:
    """Return the conversation that the path names, and its name.

    Raises:
        NotFoundError: the key has no conversation of this name.
    """
    store_of(state_of(request), "This address")
    name = request.path_params["conversation_id"]
    conversation = await load_for(request, name, StoredConversation)
    if conversation is None:
        raise not_found("Conversation", name)
    return name, conversation


def _item(request: Request, conversation: StoredConversation) -> Item:
    name = request.path_params["item_id"]
    for item in conversation.items:
        if item["id"] == name:
            return item
    raise NotFoundError(f"The conversation has no item with id {show(name)}.", None, "not_found")


def _new_items(items: Sequence[Item], before: Sequence[Item], owner: str, begin: int) -> list[Item]:
    for i, item in enumerate(items):
        if item["type"] == "item_reference":
            raise RequestError(
                f"items[{i}].type='item_reference' is not allowed; send the item itself.",
                f"items[{i}].type",
            )
    return with_other_ids(with_ids(items, owner, begin), before, owner, begin)


def _check_room(conversation: StoredConversation, new: list[Item], limit: int) -> None:
    """Raise RequestError if a conversation has no room for new items, or for any."""
    items = [*conversation.items, *new]
    if len(items) > MAX_ITEMS or items_nbytes(items) > limit:
        raise RequestError(
            f"The conversation would have {len(items)} items; at most {MAX_ITEMS} items and "
            f"{limit} bytes (--max-request-bytes) are allowed; delete some, or create another "
            "conversation.",
            "conversation",
            "conversation_full",
        )


def _respond(name: str, conversation: StoredConversation) -> Response:
    return answers.respond(
        response_answers.Conversation(
            id=name,
            object="conversation",
            created_at=conversation.created_at,
            metadata=conversation.metadata,
        )
    )
