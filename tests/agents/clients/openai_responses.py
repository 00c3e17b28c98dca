"""openai: a streamed response with a call, and the answer after its output and all items."""

import json
import os

from openai import OpenAI

client, model = OpenAI(), os.environ["MODEL"]
tool = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
items = [{"role": "user", "content": "What is the weather in Paris?"}]
with client.responses.stream(model=model, input=items, tools=[tool], store=False) as stream:
    for _ in stream:
        pass
    answer = stream.get_final_response()
(call,) = [item for item in answer.output if item.type == "function_call"]
assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"}), answer
assert answer.usage.output_tokens_details.reasoning_tokens == 1, answer.usage
items += [item.model_dump(exclude_none=True) for item in answer.output]
items.append({"type": "function_call_output", "call_id": call.call_id, "output": "21"})
answer = client.responses.create(model=model, input=items, tools=[tool], store=False)
assert answer.output_text == "It is 21 degrees in Paris.", answer
