"""Chat templates in the public formats of the families, shortened: roles, system prompts, tools, thinking. Each entry:
the control tokens, the template, and the expected texts of CHATS (None: the template refuses the chat)."""

from __future__ import annotations

from typing import Any, NamedTuple

SYSTEM, ASK = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
REPLY, MORE = {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "More"}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one question": [ASK], "a system prompt": [SYSTEM, ASK], "two turns": [ASK, REPLY, MORE],
    "two questions": [ASK, MORE],
}


class Format(NamedTuple):
    tokens: str  # control tokens, separated by spaces; the first is the BOS, the last the EOS
    template: str
    texts: dict[str, str | None]
    options: dict[str, Any] | None = None  # further variables of the template
    optional: str = ""  # what `options` add to the text of "one question"


GEMMA_TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + "
    "(first if loop.first and first else '') + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN35 = (  # calls in tags, thinking of the turns after the last question only
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools>' }}"
    "{% if messages[0].role == 'system' %}{{ '\n\n' + messages[0].content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content | trim + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{% set thought = m.reasoning_content | default('', true) | trim %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if thought and loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{% set content = (m.content or '') | trim %}{{ content }}{% for call in m.tool_calls or [] %}"
    "{{ ('\n\n' if content else '') if loop.first else '\n' }}"
    "{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for name, value in call.function.arguments | items %}{{ '<parameter=' + name + '>\n' }}"
    "{{ value if value is string else value | tojson if value is mapping or value is sequence else value | string }}"
    "{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
FORMATS = {
    "Gemma 2": Format(
        "<bos> <start_of_turn> <end_of_turn> <eos>",
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}" + GEMMA_TURNS,
        {
            "one question": "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
            "a system prompt": None,
            "two turns": "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
            "<start_of_turn>user\nMore<end_of_turn>\n<start_of_turn>model\n",
            "two questions": None,
        },
    ),
    "Gemma 3": Format(
        "<bos> <start_of_turn> <end_of_turn> <eos>",
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
        "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}" + GEMMA_TURNS,
        {
            "a system prompt": "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n",
            "two questions": None,
        },
    ),
    "Granite": Format(
        "<|end_of_text|> <|start_of_role|> <|end_of_role|>",
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
        "{% else %}{% set system = 'You are Granite.' %}{% endif %}"
        "{% if thinking %}{% set system = system + ' Think first.' %}{% endif %}"
        "{{ '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}"
        "{% if tools %}{{ '<|start_of_role|>tools<|end_of_role|>' + tools | tojson + '<|end_of_text|>\n' }}{% endif %}"
        "{% for m in messages %}"
        "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
        {
            "one question": "<|start_of_role|>system<|end_of_role|>You are Granite.<|end_of_text|>\n"
            "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
            "a system prompt": "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
            "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        },
        {"thinking": True, "tools": [TOOL]},
        " Think first.",
    ),
    "Ministral": Format(
        "<s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] </s>",
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}{% if loop.last and tools %}"
        "{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
        "{{ '[INST]' + (system + '\n\n' if loop.last and system is defined else '') + m.content + '[/INST]' }}"
        "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
        {
            "one question": "<s>[INST]Hi[/INST]",
            "a system prompt": "<s>[INST]Be brief.\n\nHi[/INST]",
            "two turns": "<s>[INST]Hi[/INST]Hello.</s>[INST]More[/INST]",
            "two questions": None,
        },
        {"tools": [TOOL]},
        "[AVAILABLE_TOOLS][",
    ),
    "SmolLM3": Format(
        "<|im_start|> <|im_end|>",
        "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
        "{% set ns = namespace(system='') %}{% if messages[0].role == 'system' %}"
        "{% set ns.system = messages[0].content %}{% endif %}{{ '<|im_start|>system\nReasoning: ' }}"
        "{{ ('/think' if enable_thinking else '/no_think') + '\n' + ns.system + '<|im_end|>\n' }}"
        "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if not enable_thinking %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}",
        {
            "a system prompt": "<|im_start|>system\nReasoning: /think\nBe brief.<|im_end|>\n<|im_start|>user\nHi"
            "<|im_end|>\n<|im_start|>assistant\n",
        },
        {"enable_thinking": False},
        "<|im_start|>assistant\n<think>\n\n</think>\n",
    ),
    "Qwen3.5": Format(
        "<|endoftext|> <|im_start|> <|im_end|>",
        QWEN35,
        {
            "one question": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n",
            "a system prompt": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n",
            "two turns": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
            "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n<think>\n",
        },
        {"enable_thinking": False, "tools": [TOOL]},
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "Phi-4-mini": Format(
        "<|endoftext|> <|system|> <|user|> <|assistant|> <|tool|> <|/tool|> <|end|>",
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + "
        "('<|tool|>' + tools | tojson + '<|/tool|>' if m.role == 'system' and tools else '') + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}",
        {
            "one question": "<|user|>Hi<|end|><|assistant|>",
            "a system prompt": "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>",
        },
    ),
    "OLMo 2": Format(
        "<|endoftext|>",
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + "
        "('\n' if m.role != 'assistant' else eos_token + '\n') }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        {
            "two turns": "<|endoftext|><|user|>\nHi\n<|assistant|>\nHello.<|endoftext|>\n<|user|>\nMore\n"
            "<|assistant|>\n",
        },
    ),
    "GLM-4": Format(
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|>",
        "[gMASK]<sop>{% if tools %}{{ '<|system|>\n# Tools\n' + tools | tojson }}{% endif %}{% for m in messages %}"
        "{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        {"one question": "[gMASK]<sop><|user|>\nHi<|assistant|>\n"},
        {"tools": [TOOL]},
        "<|system|>\n# Tools\n[",
    ),
    "Seed-OSS": Format(
        "<seed:bos> <seed:think> </seed:think> <seed:eos>",
        "{% for m in messages %}{{ bos_token + m.role + '\n' + m.content + eos_token }}{% endfor %}"
        "{% if thinking_budget is defined %}"
        "{{ bos_token + 'system\nbudget ' ~ thinking_budget ~ eos_token }}{% endif %}"
        "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}",
        {"one question": "<seed:bos>user\nHi<seed:eos><seed:bos>assistant\n"},
        {"thinking_budget": 512},
        "budget 512",
    ),
    "gpt-oss": Format(
        "<|startoftext|> <|start|> <|message|> <|channel|> <|end|> <|return|>",
        "{% macro turn(role, text) %}{{ '<|start|>' + role + '<|message|>' + text + '<|end|>' }}{% endmacro %}"
        "{{ turn('system', 'Reasoning: ' + reasoning_effort | default('medium')) }}"
        "{% if messages[0].role == 'system' %}{{ turn('developer', '# Instructions\n\n' + messages[0].content) }}"
        "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% else %}"
        "{{ turn(m.role, m.content) }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        {
            "a system prompt": "<|start|>system<|message|>Reasoning: medium<|end|><|start|>developer<|message|>"
            "# Instructions\n\nBe brief.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant",
        },
        {"reasoning_effort": "high"},
        "Reasoning: high",
    ),
}
