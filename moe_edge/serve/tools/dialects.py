"""The dialects by name, and which one a chat template speaks."""

from moe_edge.core.checks import check_known
from moe_edge.serve.tools.base import Dialect
from moe_edge.serve.tools.deepseek import DeepSeek
from moe_edge.serve.tools.glm import Glm
from moe_edge.serve.tools.harmony import Harmony
from moe_edge.serve.tools.hermes import Hermes
from moe_edge.serve.tools.minimax import MiniMax
from moe_edge.serve.tools.mistral import Mistral
from moe_edge.serve.tools.qwen_xml import QwenXml

# In the order in which templates are looked through: some have the marks of two.
_KINDS = (Harmony, MiniMax, Glm, QwenXml, DeepSeek, Mistral, Hermes)
DIALECTS: dict[str, Dialect] = {kind.name: kind() for kind in _KINDS}


def find_dialect(template: str, name: str = "auto") -> Dialect | None:
    """The dialect of a name, or for `auto` of a chat template's source.

    Returns:
      None for templates that take no tools, or mark calls as no dialect does.
    Raises:
      ConfigError: an unknown name.
    """
    if name != "auto":
        check_known("tool parser", name, ("auto", *DIALECTS))
        return DIALECTS[name]
    if "tools" not in template and "functions" not in template:
        return None
    return next((d for d in DIALECTS.values() if d.mark in template), None)
