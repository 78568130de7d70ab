#!lua flags=allow-oom
-- Reads the store's identity, or writes it if there is none. Processes that start at once get the same answer.
-- ARGV: format, partitions and deployment id to write if the store has none
-- Returns: {format, partitions, deployment}
if redis.call('EXISTS', store_key()) == 0 then
  redis.call('HSET', store_key(), 'format', ARGV[1], 'partitions', ARGV[2], 'deployment', ARGV[3], 'created', now_ms())
end
return redis.call('HMGET', store_key(), 'format', 'partitions', 'deployment')
