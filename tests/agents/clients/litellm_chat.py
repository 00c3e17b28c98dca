"""litellm: a call with reasoning, and the answer after its result."""

import json
import os

import litellm

model = f"hosted_vllm/{os.environ['MODEL']}"
server = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
for stream in (False, True):
    answer = litellm.completion(model, messages, tools=tools, stream=stream, **server)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}, answer
    assert message.reasoning_content == "I should look it up.", answer
messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "21"}]
answer = litellm.completion(model, messages, tools=tools, **server)
assert answer.choices[0].message.content == "It is 21 degrees in Paris.", answer
