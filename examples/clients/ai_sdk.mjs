// Vercel's AI SDK: text, tools and objects, by the Responses API, which its OpenAI provider speaks by default, or by what
// a second argument says: `chats` or Anthropic's `messages`.

import { createRequire } from 'node:module'
const require = createRequire(`${process.env.NODE_PATH ?? '.'}/`)
const { generateText, stepCountIs, streamText, tool, Output } = require('ai')
const { z } = require('zod')

const baseURL = `${process.env.PENSTOCK_URL ?? 'http://127.0.0.1:8000'}/v1`
const apiKey = process.env.PENSTOCK_API_KEY ?? 'none'
const listed = await fetch(`${baseURL}/models`, { headers: { Authorization: `Bearer ${apiKey}` } })
const providers = {
  responses: () => require('@ai-sdk/openai').createOpenAI({ baseURL, apiKey }),
  messages: () => require('@ai-sdk/anthropic').createAnthropic({ baseURL, apiKey }),
  chats() {
    const { createOpenAICompatible } = require('@ai-sdk/openai-compatible')
    return createOpenAICompatible({ name: 'penstock', baseURL, apiKey, supportsStructuredOutputs: true })
  },
}
const model = providers[process.argv[3] ?? 'responses']()((await listed.json()).data[0].id)
const River = z.object({ name: z.string(), long: z.boolean() })

const cases = {
  async plain() {
    return (await generateText({ model, prompt: 'Name a river.', maxOutputTokens: 16 })).text
  },

  async streamed() {
    const pieces = []
    for await (const piece of streamText({ model, prompt: 'Name a river.', maxOutputTokens: 16 }).textStream) {
      pieces.push(piece)
    }
    return pieces
  },

  async tools() {
    const get_weather = tool({
      description: 'The weather of a city.',
      inputSchema: z.object({ city: z.string() }),
      execute: ({ city }) => `${city}: rain`,
    })
    const prompt = 'What is the weather in Bern? Call get_weather.'
    const stopWhen = stepCountIs(5)
    const answer = await generateText({ model, prompt, tools: { get_weather }, stopWhen, maxOutputTokens: 100 })
    if (!answer.steps[0].toolResults.length) throw new Error('no call')
    return answer.text
  },

  async structured() {
    const output = Output.object({ schema: River })
    return (await generateText({ model, prompt: 'Name a river.', output, maxOutputTokens: 200 })).output
  },
}

console.log(JSON.stringify(await cases[process.argv[2]]()))
