"""/tokenize, /detokenize and /tokenizer_info, in vLLM's shapes.

With them lm-eval's `local-completions` needs no tokenizer of its own.
"""

from typing import Any

from moe_edge.convert.special_tokens import read_special_tokens, read_tokenizer_config
from moe_edge.serve.chat_body import messages_reader, template_variables
from moe_edge.serve.chat_template import ChatTemplate
from moe_edge.serve.errors import bad_value
from moe_edge.serve.fields import flag, read_fields, read_object, text, token_ids
from moe_edge.serve.served_model import ServedModel

_CHAT_NEUTRAL = {
    "continue_final_message": False,
    "tools": [],
    "chat_template": None,
}


def tokenize(body: bytes, model: ServedModel, template: ChatTemplate) -> dict[str, Any]:
    """Ids of a text, or of a conversation as the chat route would encode it.

    Long texts take up to a second: call it in a thread (Python's lock is free).

    Raises:
      ApiError: what is wrong with the body, by the field's name.
    """
    readers = {
        "model": model.check_id,
        "prompt": text,
        "messages": messages_reader(model),
        "add_special_tokens": flag,
        "add_generation_prompt": flag,
        "chat_template_kwargs": template_variables,
        "return_token_strs": flag,
    }
    values = read_fields(read_object(body), readers, _CHAT_NEUTRAL)
    if ("prompt" in values) == ("messages" in values):
        raise bad_value("prompt", "expected either a prompt or messages")
    if "prompt" in values:
        prompt, begin = values["prompt"], True
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if name in values:
                raise bad_value(name, f"{name} is for messages; leave it out")
    else:
        prompt = template.render(
            values["messages"],
            add_generation_prompt=values.get("add_generation_prompt", True),
            variables=values.get("chat_template_kwargs"),
        )
        begin = template.adds_special
    begin = values.get("add_special_tokens", begin)
    end = begin and "prompt" in values  # a conversation goes on
    (ids,) = model.tokenizer.encode_batch([prompt], begin=begin, end=end)
    answer = {"count": len(ids), "max_model_len": model.max_context, "tokens": ids}
    if values.get("return_token_strs", False):
        answer["token_strs"] = [model.tokenizer.token(id) for id in ids]
    return answer


def detokenize(body: bytes, model: ServedModel) -> dict[str, Any]:
    """Text of ids, with special tokens.

    Raises:
      ApiError: what is wrong with the body, by the field's name.
    """
    readers = {"model": model.check_id, "tokens": token_ids(model.vocab_size)}
    values = read_fields(read_object(body), readers)
    if "tokens" not in values:
        raise bad_value("tokens", "there are no tokens; give a list")
    return {"prompt": model.tokenizer.decode(values["tokens"], special=True)}


def tokenizer_info(model: ServedModel, template: ChatTemplate) -> dict[str, Any]:
    """What the tokenizer's config says, and what clients look for in it.

    Special tokens are plain texts; `eos_token` is there in any case, and
    `chat_template` is the one that is in use.

    Raises:
      CheckpointError: the config cannot be read.
    """
    tokenizer = model.tokenizer
    config = read_tokenizer_config(tokenizer.folder)
    eos = tokenizer.token(model.eos_ids[0]) if model.eos_ids else None
    return (
        {"tokenizer_class": "PreTrainedTokenizerFast"}
        | config
        | {"eos_token": eos}
        | read_special_tokens(tokenizer.folder).names
        | {"chat_template": template.source, "model_max_length": model.max_context}
    )
