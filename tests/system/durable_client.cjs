// Follows a stream with the Node client of Durable Streams: URL, offset, kind of read.
// Prints each batch as one line of JSON: the offset behind it, and its messages; an empty one as it begins. Ends with the stream.
const { stream } = require("@durable-streams/client");

const [url, offset, live] = process.argv.slice(2);

async function follow() {
  console.log('["", []]');
  const response = await stream({ url, offset, live, json: true });
  response.subscribeJson(async (batch) => {
    if (batch.items.length) console.log(JSON.stringify([batch.offset, batch.items]));
  });
  await response.closed;
}

follow().catch((error) => {
  console.error(error);
  process.exit(1);
});
