"""Chat templates in each family's dialect: its markers, and what of jinja2 it uses.

Written for these tests: the published ones are longer, mostly by their tools.
"""

_THINK_TAGS = """\
[gMASK]<sop>
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>
{{ m.content }}
{{- '/nothink' if enable_thinking is defined and not enable_thinking else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set content = m.content -%}
{%- if '</think>' in content -%}
    {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() -%}
    {%- set content = content.split('</think>')[-1].strip() -%}
    {%- if loop.index0 > ns.last %}{{ '\\n<think>' ~ thought ~ '</think>' }}{% endif -%}
{%- endif -%}
{{ '\\n' + content }}
{%- elif m.role == 'system' -%}<|system|>
{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{{- '\\n<think></think>' if enable_thinking is defined and not enable_thinking -}}
{%- endif -%}"""

_USER_PROMPT = """\
{%- set role = {'user': 'userprompt', 'system': 'system', 'assistant': 'response'} -%}
{%- for m in messages -%}
{{- '<|' ~ role[m.role] ~ '|>' ~ m.content ~ '<|endof' ~ role[m.role] ~ '|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|response|>' }}{%- endif -%}"""

_TILDES = """\
{%- macro whole(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for item in content -%}{{ item.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set system = none -%}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0] -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{{- ']~!b[' ~ ']~b]system' ~ '\\n' -}}
{{- whole(system.content) if system else model_identity | default('A helper.') -}}
{{- '[e~[\\n' -}}
{%- for m in messages -%}
{{- ']~b]' ~ ('ai' if m.role == 'assistant' else m.role) ~ '\\n' ~ whole(m.content) -}}
{{- '[e~[\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai\\n<think>\\n' -}}{%- endif -%}"""

_NAMED_TURNS = """\
{{- cls_token | default('<|begin_of_sentence|>') -}}
{%- for m in messages -%}
    {%- if m['role'] == 'user' -%}{{ 'User: ' + m['content'] + '\\n' }}
    {%- elif m['role'] == 'assistant' -%}
        {{ 'Assistant: ' + m['content'] + (sep_token or '<|end_of_sentence|>') }}
    {%- else -%}{{ m['content'] | trim + '\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant: ' }}{%- endif -%}"""

_FULL_WIDTH = """\
{%- set loop_messages = messages -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set loop_messages = messages[1:] -%}
    <｜hy_begin｜>{{ messages[0]['content'] }}<｜hy_place▁holder▁no▁3｜>
{%- else -%}<｜hy_begin｜>{%- endif -%}
{%- for m in loop_messages -%}
    {%- if m['role'] == 'user' -%}
        {%- if loop.last and enable_thinking is defined and not enable_thinking -%}
            <｜hy_User｜>/no_think{{ m['content'].lstrip('/no_think') }}
        {%- else -%}<｜hy_User｜>{{ m['content'] }}{%- endif -%}
    {%- elif m['role'] == 'assistant' -%}
        <｜hy_Assistant｜>{{ m['content'] }}<｜hy_place▁holder▁no▁2｜>
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<｜hy_Assistant｜>
{%- if enable_thinking is defined and not enable_thinking -%}
<think>\n\n</think>\n{%- endif -%}{%- endif -%}"""

_ROLE_TOKENS = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set system = "Today is " + (strftime_now('%Y')[:0] or 'a day') + '.' %}
    {%- if thinking %}{%- set system = system + " Think first." %}{%- endif %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- for m in rest %}
    {{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] }}
    {{- '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""

_BRACKETS = """\
{%- set image_count = namespace(value=0) %}
{%- if not skip_think is defined %}{%- set skip_think = true %}{%- endif %}
{%- set marks = {'user': '[|user|]', 'assistant': '[|assistant|]',
                 'system': '[|system|]'} %}
{%- for i in range(messages | length) %}
    {%- set m = messages[i] %}
    {%- if m.role not in marks %}{{- raise_exception('unknown role') }}{%- endif %}
    {{- marks[m.role] }}
    {%- if m.role == 'assistant' and '</think>' in m.content and skip_think %}
        {{- '<think>\\n\\n</think>\\n\\n' + m.content.split('</think>')[-1].lstrip() }}
    {%- else %}{{- m.content }}{%- endif %}
    {{- '[|endofturn|]\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[|assistant|]\\n<think>\\n' if enable_thinking is defined and enable_thinking
        else '[|assistant|]\\n<think>\\n\\n</think>\\n\\n' }}
{%- endif %}"""

_PHI = """\
{% for m in messages %}{% if m['role'] in ['system', 'user'] %}\
{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}\
{% elif m['role'] == 'assistant' %}{% generation %}\
{{ '<|assistant|>\\n' + m['content'] + '<|end|>\\n' }}{% endgeneration %}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}\
{% else %}{{ eos_token }}{% endif %}"""

_CONTENT_BEGIN = """\
{%- for m in messages -%}
    {%- if loop.first and m.role != 'system' -%}
        {{- '<|begin|>system<|content|>' ~ (reasoning_effort | default('high')) -}}
        {{- '<|end|>\\n' -}}
    {%- endif -%}
    {{- '<|begin|>' ~ m.role ~ '<|content|>' ~ m.content ~ '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|begin|>assistant' -}}
    {%- if reasoning_effort | default('high') == 'low' -%}
        {{- '<|think|><|end|>\\n<|begin|>assistant<|content|>' -}}
    {%- endif -%}
{%- endif -%}"""

_FULL_WIDTH_BARS = """\
{%- if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(system='', is_first=true) %}
{%- for m in messages if m.role == 'system' %}
    {%- set ns.system = ns.system ~ ('' if ns.is_first else '\\n\\n') ~ m.content %}
    {%- set ns.is_first = false %}
{%- endfor %}
{{- bos_token or '<｜begin▁of▁sentence｜>' }}{{ ns.system }}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
    {%- else %}{{ '<｜Assistant｜></think>' + m.content.split('</think>', 1)[-1] }}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜Assistant｜>' ~ ('<think>' if thinking else '</think>') }}
{%- endif %}"""

_TURNS = """\
{{ bos_token }}
{%- if messages[0]['role'] in ('system', 'developer') -%}
    {%- set first = messages[0]['content'] | trim ~ '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}
    {{ '<|turn>' + role + '\\n' + (first if loop.first else '') + m['content'] | trim }}
    {{- '<turn|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn>model\\n' }}
{%- if not enable_thinking | default(false) -%}{{ '<|channel>thought\\n<channel|>' }}
{%- endif -%}{%- endif -%}"""

_HEADERS = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|header_start|>' + m['role'] + '<|header_end|>\\n\\n' }}
    {%- if m['content'] is string %}{{- m['content'] | trim }}
    {%- else %}
        {%- for part in m['content'] if part['type'] == 'text' %}
            {{- part['text'] | trim }}
        {%- endfor %}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header_start|>assistant<|header_end|>\\n\\n' }}
{%- endif %}"""

_CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are ' ~ (name or 'a helper') ~ '.<|im_end|>' }}
{%- endif %}
{%- for m in messages[::-1] %}{%- if loop.first %}{%- set last = m %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if not enable_thinking | default(true) %}{{- '<think></think>' }}{%- endif %}
{%- endif %}"""

_WITH_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools> <tool_call></tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {{- '<|im_start|>assistant\\n' + (m.content or '') }}
        {%- for call in m.tool_calls %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' ~ m.content ~ '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

_THINKS_FIRST = """\
{%- macro shown(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- else -%}{%- for item in content or [] -%}{{- item.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nReply as <tool_call>\\n<function=name>\\n<parameter=p>' }}
    {{- '\\nvalue\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = shown(m.content) | trim %}
    {%- if m.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('The system comes first.') }}
        {%- endif %}
        {{- '<|im_start|>system\\n' ~ content ~ '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = m.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' ~ (thought | trim) ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\\n<function=' ~ call.name ~ '>\\n' }}
            {%- for name, value in call.arguments | items %}
                {%- set text = value if value is string else value | tojson %}
                {{- '<parameter=' ~ name ~ '>\\n' ~ text ~ '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_wind",
            "description": "Of a <place> & 'time'.",
            "parameters": {"type": "object", "properties": {"p": {"type": "string"}}},
        },
    }
]
TOOL_TALK = [
    {"role": "user", "content": "wind?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "get_wind", "arguments": {"p": "é <b>", "n": 1.5}},
            }
        ],
    },
    {"role": "tool", "content": '{"wind": "north"}'},
]
FAMILY_TEMPLATES = {
    "qwen3_moe": _WITH_TOOLS,
    "glm4_moe": _THINK_TAGS,
    "glm4_moe_lite": _THINK_TAGS,
    "glm_moe_dsa": _THINK_TAGS,
    "dots1": _USER_PROMPT,
    "minimax_m2": _TILDES,
    "ernie4_5_moe": _NAMED_TURNS,
    "hunyuan_v1_moe": _FULL_WIDTH,
    "solar_open": _CONTENT_BEGIN,
    "granitemoe": _ROLE_TOKENS,
    "granitemoeshared": _ROLE_TOKENS,
    "exaone_moe": _BRACKETS,
    "flex_olmo": _PHI,
    "deepseek_v32": _FULL_WIDTH_BARS,
    "phimoe": _PHI,
    "gemma4_text": _TURNS,
    "llama4_text": _HEADERS,
    "mimo_v2_flash": _CHATML,
    "lfm2_moe": _CHATML,
    "qwen3_5_moe_text": _THINKS_FIRST,
}
# What a request may say of thinking, under each family's own name.
SWITCHES = (
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"thinking": True},
    {"reasoning_effort": "low"},
    {"skip_think": False},
    {"controls": {"length": "short"}},
)
CONVERSATIONS = (
    [{"role": "user", "content": "mill?"}],
    [
        {"role": "system", "content": " Be <short> & 'kind'. "},
        {"role": "user", "content": "mill\n"},
        {"role": "assistant", "content": "<think>\nwheat \n</think>\n\nA house. 🦊"},
        {"role": "user", "content": "/no_think Go on {{ x }}"},
    ],
)
