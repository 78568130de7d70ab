// The openai package of npm: chats, tools, schemas, and a response whose stream goes on after its API process was lost.

import { createRequire } from 'node:module'
const require = createRequire(`${process.env.NODE_PATH ?? '.'}/`)
const { OpenAI } = require('openai')
const { zodResponseFormat } = require('openai/helpers/zod')
const { z } = require('zod')

const baseURL = `${process.env.PENSTOCK_URL ?? 'http://127.0.0.1:8000'}/v1`
const client = new OpenAI({ baseURL, apiKey: process.env.PENSTOCK_API_KEY ?? 'none' })
const model = (await client.models.list()).data[0].id
const messages = [{ role: 'user', content: 'Name a river.' }]
const River = z.object({ name: z.string(), long: z.boolean() })

const cases = {
  async plain() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 16 })
    return answer.choices[0].message.content
  },

  async streamed() {
    const pieces = []
    for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 16, stream: true })) {
      if (chunk.choices[0].delta.content) pieces.push(chunk.choices[0].delta.content)
    }
    return pieces
  },

  async tools() {
    const get_weather = {
      name: 'get_weather',
      description: 'The weather of a city.',
      parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
      parse: JSON.parse,
      function: ({ city }) => `${city}: rain`,
    }
    const runner = client.chat.completions.runTools({
      model,
      messages: [{ role: 'user', content: 'What is the weather in Bern? Call get_weather.' }],
      tools: [{ type: 'function', function: get_weather }],
    })
    return await runner.finalContent()
  },

  async structured() {
    const response_format = zodResponseFormat(River, 'river')
    const answer = await client.chat.completions.parse({ model, messages, response_format, max_tokens: 200 })
    return answer.choices[0].message.parsed
  },

  // After the line `begun`, the API process may be killed: another one gives the rest.
  async resumed() {
    const asked = { model, input: 'Tell me about rivers.', max_output_tokens: 300 }
    let stream = await client.responses.create({ ...asked, background: true, stream: true })
    let [id, last, kind, pieces] = ['', -1, '', []]
    while (!['response.completed', 'response.incomplete'].includes(kind)) {
      try {
        if (id) stream = await client.responses.retrieve(id, { stream: true, starting_after: last })
        for await (const event of stream) {
          ;[last, kind] = [event.sequence_number, event.type]
          if (kind === 'response.created') id = event.response.id
          if (kind === 'response.output_text.delta') pieces.push(event.delta)
          if (kind === 'response.output_text.delta' && pieces.length === 5) console.log('begun')
        }
      } catch (error) {
        await new Promise((resolve) => setTimeout(resolve, 500))
      }
    }
    return pieces
  },
}

console.log(JSON.stringify(await cases[process.argv[2]]()))
