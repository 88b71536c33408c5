// The Node packages: openai, Anthropic's, and Vercel's ai with its openai-compatible provider.

// needs: openai@7.57.0 @anthropic-ai/sdk@1.12.0 ai@6.0.326 @ai-sdk/openai-compatible@2.0.87 zod@4
import assert from "node:assert";
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText, generateObject, tool } from "ai";
import { z } from "zod";

const url = process.argv[2];
const messages = [{ role: "user", content: "Name three colours." }];
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;

async function openai() {
  const asked = { model, messages, max_tokens: 24, seed: 5 };
  const whole = await client.chat.completions.create(asked);
  const text = whole.choices[0].message.content;
  assert(text);
  let streamed = "", usage = null;
  const told = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ ...asked, ...told })) {
    streamed += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(streamed, text);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  const helped = client.chat.completions.stream(asked);
  assert.equal(await helped.finalContent(), text);
  const one = await client.completions.create({ model, prompt: "One two", max_tokens: 8, temperature: 0 });
  assert(one.choices[0].text);
  const response = await client.responses.create({ model, input: "Name three colours.", max_output_tokens: 24 });
  assert(response.output_text);
  await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), OpenAI.BadRequestError);
  const left = await client.chat.completions.create({ ...asked, max_tokens: 400, stream: true });
  for await (const _ of left) break; // leaves
}

async function anthropic() {
  const other = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const asked = { model, messages, max_tokens: 24, temperature: 0 };
  const whole = await other.messages.create(asked);
  assert(whole.content[0].text);
  const final = await other.messages.stream(asked).finalMessage();
  assert.deepEqual(final.content[0].text, whole.content[0].text);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
  await assert.rejects(other.messages.create({ ...asked, max_tokens: 0 }), Anthropic.BadRequestError);
}

async function vercel() {
  const settings = { supportsStructuredOutputs: true, includeUsage: true };
  const provider = createOpenAICompatible({ name: "outpace", baseURL: `${url}/v1`, ...settings });
  const asked = { model: provider(model), prompt: "Name three colours.", maxRetries: 0, temperature: 0 };
  const whole = await generateText({ ...asked, maxOutputTokens: 24 });
  assert(whole.text);
  const stream = streamText({ ...asked, maxOutputTokens: 24 });
  let streamed = "";
  for await (const part of stream.textStream) streamed += part;
  assert.equal(streamed, whole.text);
  assert((await stream.usage).outputTokens > 0);
  const schema = z.object({ name: z.enum(["Ada", "Grace"]), born: z.union([z.literal(1815), z.literal(1906)]) });
  const { object } = await generateObject({ ...asked, schema, maxOutputTokens: 100 });
  assert(["Ada", "Grace"].includes(object.name));
  const clock = tool({ description: "The time", inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }) });
  const called = await generateText({ ...asked, tools: { clock }, toolChoice: "required", maxOutputTokens: 100 });
  assert.equal(called.toolCalls[0].toolName, "clock");
  assert(["Rome", "Oslo"].includes(called.toolCalls[0].input.city));
  const calling = streamText({ ...asked, tools: { clock }, toolChoice: "required", maxOutputTokens: 100 });
  assert.deepEqual((await calling.toolCalls)[0].input, called.toolCalls[0].input);
}

await openai();
await anthropic();
await vercel();
