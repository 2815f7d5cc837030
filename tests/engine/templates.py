"""Chat templates with the structure that families of models give theirs, in our own words."""

QWEN25 = """\
{%- set system = messages[0].content if messages[0].role == 'system' else 'Be helpful.' %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- '\\n\\n# Functions\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Calls between tags, results as a user's."""

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Functions\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(asked=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.asked and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}{{ content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
"""Thinking is kept behind the last question and dropped before it."""

LLAMA31 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('Only one call at once!') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and message.role == 'user' and loop.first %}
            {%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}
        {%- endif %}
        {{- (message.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
"""One bare call a message."""

MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(users=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and message.tool_calls is not defined) %}
        {%- if (message.role == 'user') != (ns.users % 2 == 0) %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}
        {%- set ns.users = ns.users + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.first %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('Ids have nine letters!') }}{% endif %}
            {%- set text = call.function | tojson %}
            {{- text[:-1] + ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}{{ ' ' + (message.content | trim) + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
"""All calls in one list, each with an id of nine letters; assistants without calls must alternate with users."""

R1 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{ '<A>' + message.content.split('</think>')[-1] + eos_token }}
    {%- else %}{{ '<' + message.role + '>' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<A><think>\\n' }}{% endif %}
"""
"""The prompt opens the thinking; earlier thinking is dropped."""

MAGISTRAL = """\
{%- for message in messages %}
    {{- '[' + message.role + ']' }}
    {%- if message.reasoning_content %}{{ '[THINK]' + message.reasoning_content + '[/THINK]' }}{% endif %}
    {{- message.content }}
{%- endfor %}
"""

TOOLS_IN_XML = """\
{%- for tool in tools or [] %}{{ '<function>' + tool.function.name + '</function>' }}{% endfor %}
{%- for message in messages %}
    {{- '<' + message.role + '>' + message.content }}
    {%- for call in message.tool_calls or [] %}{{ '<function=' + call.function.name + '>' }}{% endfor %}
{%- endfor %}
"""
"""Knows tools, in a form that nothing here reads."""
