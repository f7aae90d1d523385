"""The vocabulary and chat template of the demo model: plain data, no numpy.

SentencePiece merges pairwise, so a word can be reached only through its prefixes: each of
them is a token too. Every byte has a token, so any text can be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

SPACE = "\u2581"  # how SentencePiece writes a space
UNKNOWN, BEGIN, END, TURN_BEGIN, TURN_END, ASKED_TO_CALL, CALL_BEGIN, CALL_END = range(8)  # ids

TEXT = (
    "a about after again air all also an and animal answer apple are around as at autumn away "
    "back be bear before bell below best big bird blue boat book both bread bridge bright bring "
    "brown but by calm can candle cat chair child city clear cloud cold come corn could country "
    "day deep did do dog door down draw dream dry dust each early earth east echo egg end even "
    "ever every eye face fall far farm fast field find fire first fish five flower fog for forest "
    "found four fox friend from full garden gave glass go gold good grass gray great green ground "
    "had half hand has have he hear heart help her here high hill him his home horse house how "
    "ice if in iron island it jar join journey just keep kind king kite know lake lamp land large "
    "last late laugh leaf learn leave left lemon letter life light like line lion listen little "
    "long look love low made make many map may me milk mine mirror mist moon more morning most "
    "mountain mouse move much music my name near never new next night no north not now oak ocean "
    "of off old on one open or other our out over owl page paper path people piano pine place "
    "plant play plum pond quick quiet rain read red rest rice right ring river road rock room "
    "rope rose round run sail salt same sand say sea see seed seven she ship shore silver sing "
    "six sky sleep slow small snow so song soon south star stay stone story street strong such "
    "sugar summer sun sweet take tea tell ten than that the their them then there they thing "
    "think this three time to train tree true turn two under until up us valley very village "
    "voice walk wall warm was water wave way we well went west what wheat when where white who "
    "why wide will wind window winter with wolf wood word work world would year yellow yes yet "
    "you young caf\u00e9 na\u00efve stra\u00dfe "
    "assistant system tool user"
)
WORDS = tuple(TEXT.split())
BARE_WORDS = ("assistant", "system", "user")  # also without a space before: they follow a control

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call one or more functions. Their signatures:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nFor each call return a JSON object within <tool_call></tool_call>:\\n' }}
{{- '<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' }}{{- message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '<tool_call>{"name": "' + function.name + '", "arguments": ' }}
{%- if function.arguments is string %}{{- function.arguments }}
{%- else %}{{- function.arguments | tojson }}{%- endif %}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if tools and messages and messages[-1].role == 'user' %}{{- '<|use_tool|>' }}{%- endif %}
{%- endif %}
"""


class Kind(IntEnum):
    """Token types as GGUF numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Token:
    """One entry: its text, its merge score, its type, and whether it ends a whole word."""

    text: str
    score: float
    kind: Kind
    is_word: bool = False


def vocabulary() -> list[Token]:
    """All tokens in the order of their ids."""
    tokens = [
        Token("<unk>", 0.0, Kind.UNKNOWN),
        Token("<s>", 0.0, Kind.CONTROL),
        Token("</s>", 0.0, Kind.CONTROL),
        Token("<|im_start|>", 0.0, Kind.CONTROL),
        Token("<|im_end|>", 0.0, Kind.CONTROL),
        Token("<|use_tool|>", 0.0, Kind.CONTROL),
        Token("<tool_call>", 0.0, Kind.USER_DEFINED),
        Token("</tool_call>", 0.0, Kind.USER_DEFINED),
    ]
    tokens += [Token(f"<0x{byte:02X}>", 0.0, Kind.BYTE) for byte in range(256)]
    words = {SPACE + word for word in WORDS}
    singles = (
        {chr(code) for code in range(0x21, 0x7F)} | {SPACE} | {c for word in words for c in word}
    )
    reachable = words | set(BARE_WORDS)
    prefixes = {word[:end] for word in reachable for end in range(2, len(word) + 1)}
    for text in [*sorted(singles), *sorted(prefixes, key=lambda text: (len(text), text))]:
        # Longer is better: the tokenizer merges the pair with the highest score first.
        tokens.append(Token(text, float(len(text)) - 100.0, Kind.NORMAL, text in words))
    return tokens
