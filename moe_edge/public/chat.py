"""A conversation as a prompt, by its checkpoint's template, as the server does it."""

from collections.abc import Mapping
from typing import Any

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.core.checks import ConfigError, RequestError


def chat_ids(
    tokenizer: Tokenizer, messages: Any, variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of the prompt for the next message of a conversation.

    Args:
      messages: each {"role": ..., "content": ...}, both texts, the oldest first.
      variables: of the template.
    Raises:
      RequestError: something else, or messages that the template refuses.
      ConfigError: jinja2, which templates are written for, is not installed.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError(
            f"messages are {messages!r:.60}, expected a list such as "
            "[{'role': 'user', 'content': 'Hello'}]"
        )
    for number, message in enumerate(messages):
        is_mapping = isinstance(message, dict)
        if not is_mapping or any(
            not isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise RequestError(
                f"message {number} is {message!r:.60}, expected texts by the names "
                "role and content"
            )
    try:
        from moe_edge.serve.chat_body import template_variables
        from moe_edge.serve.chat_template import find_template
        from moe_edge.serve.errors import ApiError
    except ImportError as error:
        raise ConfigError(
            f"a conversation needs the package {error.name}, which is not installed: "
            "pip install 'moe-edge[serve]'"
        ) from error
    template = find_template(tokenizer.folder)
    try:
        variables = template_variables("chat_template_kwargs", dict(variables or {}))
        prompt = template.render(messages, variables=variables)
    except ApiError as error:
        raise RequestError(error.message) from error
    # The answer goes on where the prompt stops, so no end token is added.
    return tokenizer.encode(prompt, begin=template.adds_special, end=False)
