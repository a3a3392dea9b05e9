"""Request bodies for schemathesis: only those that the server must accept.

Fields with rules that a schema cannot express are left out: rules about other fields (best_of = n, min_tokens ≤
max_tokens, top_logprobs needs logprobs), about other languages (grammars, regexes, JSON Schema) or about the model (its
name, its template's roles and variables). Answers are short. 2.0 is an integer in JSON Schema; it is sent as 2.
"""

from typing import Any

import schemathesis

OTHER_FIELDS = ("best_of", "min_tokens", "n", "logprobs", "top_logprobs", "max_completion_tokens")
OTHER_FIELDS += ("stream_options", "prompt_logprobs", "background", "previous_response_id")
LANGUAGES = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
LANGUAGES += ("response_format", "text", "tools", "tool_choice")
MODEL = ("model", "stop_token_ids", "allowed_token_ids", "logit_bias", "dimensions", "chat_template_kwargs")
MODEL += ("chat_template", "continue_final_message", "output_dimension", "input_type")
TIME = ("timeout_s", "queue_timeout_s")
LEFT_OUT = frozenset(OTHER_FIELDS + LANGUAGES + MODEL + TIME)
SHORT = {
    "/v1/completions": {"max_tokens": 2},
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
}
MESSAGE = {"role": "user", "content": "Hello!"}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if isinstance(case.body, dict):
        body = {name: _whole(value) for name, value in case.body.items() if name not in LEFT_OUT}
        body |= SHORT.get(case.operation.path, {})
        for name in ("messages", "input"):
            if isinstance(body.get(name), list):
                body[name] = [MESSAGE if isinstance(item, dict) else item for item in body[name]]
        case.body = body


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
