"""Chat templates as published models have them, shortened, with the special tokens that their tokenizers need."""

from __future__ import annotations

from typing import Any, NamedTuple


class Family(NamedTuple):
    """A template, its special tokens, and which of them begin and end a text."""

    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    end_of_turn: str | None = None
    """The token behind an answer, if it is not the end token."""


QWEN = Family(
    """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
)
"""Qwen2.5-Instruct: ChatML with tools. A conversation ends with the end token and a line break."""
QWEN_BASE = QWEN._replace(eos="<|endoftext|>", end_of_turn="<|im_end|>")
"""The base model has the same template and another end token."""
LLAMA3 = Family(
    """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- message.content }}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    eos="<|end_of_text|>",
    bos="<|begin_of_text|>",
    end_of_turn="<|eot_id|>",
)
"""Llama 3.1: turns end with another token than documents."""
MISTRAL = Family(
    """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] + '\\n\\n' %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first %}
            {{- '[INST] ' + system_message + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    ("<s>", "</s>", "<unk>"),
    eos="</s>",
    bos="<s>",
)
"""Mistral 7B Instruct: no generation prompt, and roles that must alternate."""
SMOL = Family(
    """\
{% for message in messages %}
{%- if message.role == 'system' %}{{ '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- generation %}{{ '<|im_start|>assistant\\n' + message.content | trim + '<|im_end|>\\n' }}{% endgeneration %}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
)
"""SmolLM3: the generation tag is around the whole turn of the assistant."""
ZEPHYR_MARKED = Family(
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|assistant|> ' }}{% generation %}{{ message.content + eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}",
    ("<s>", "</s>"),
    eos="</s>",
    bos="<s>",
)
"""Turns are named in plain text, and an answer's first token may have begun with the space before it."""
FAMILIES = {
    "qwen": QWEN, "qwen-base": QWEN_BASE, "llama3": LLAMA3, "mistral": MISTRAL, "smol": SMOL, "zephyr-marked": ZEPHYR_MARKED,
}  # fmt: skip

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city, for <3 days.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "What is asked?"},
    {"role": "assistant", "content": "This is answered."},
    {"role": "user", "content": "naïve – 語?"},
    {"role": "assistant", "content": "déjà vu 🜁! def add(a, b):\n    return a + b\n"},
]
TOOL_TURNS = [
    {"role": "user", "content": "Is it raining in Zürich?"},
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
    },
    {"role": "tool", "content": '{"rain": true}'},
    {"role": "assistant", "content": "Yes."},
]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": TURNS[:2]},
    "turns": {"messages": TURNS},
    "system": {"messages": [SYSTEM, *TURNS]},
    "question last": {"messages": TURNS[:3]},
    "tools": {"messages": [SYSTEM, *TOOL_TURNS], "tools": TOOLS},
}


def supports(family: str, conversation: str) -> bool:
    return conversation != "tools" or family in ("qwen", "qwen-base", "llama3")
