// The AI SDK: streamed text with a tool and its result, and generateObject, over its providers.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { MODEL, OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const chat = createOpenAICompatible({ name: "here", baseURL, apiKey, supportsStructuredOutputs: true });
const models = {
  chat: chat(MODEL),
  responses: createOpenAI({ baseURL, apiKey }).responses(MODEL),
  messages: createAnthropic({ baseURL, apiKey })(MODEL),
};
for (const [route, model] of Object.entries(models)) {
  const cities = [];
  const getWeather = tool({
    description: "The temperature in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => (cities.push(city), "21"),
  });
  const result = streamText({
    model,
    tools: { get_weather: getWeather },
    stopWhen: stepCountIs(3),
    prompt: "What is the weather in Paris?",
    providerOptions: { openai: { store: false } },
  });
  assert.equal(await result.text, "It is 21 degrees in Paris.", route);
  assert.deepEqual(cities, ["Paris"], route);
}
const { object } = await generateObject({
  model: models.chat,
  schema: z.object({ city: z.string(), celsius: z.number().int() }),
  prompt: "An object, please.",
});
assert.deepEqual(object, { city: "Paris", celsius: 21 });
