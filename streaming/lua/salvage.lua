#!lua flags=allow-oom
-- Stores the record of a job that a script ended after a worker had begun it, with the tokens that its workers have
-- logged, and charges its tenant for them; their logs are then needed no more. Idempotent.
-- ARGV: id, state, its runs, record, the same without its rows, tokens that the job has generated
-- Returns: 1 | 0 (not kept, or it has a record, or another state or other runs than these)
local id, state, runs, record, summary = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local s = redis.pcall('HMGET', job_key(id), 'state', 'runs', 'record', 'keep', 'tenant', 'size', 'lane', 'order')
redis.call('ZREM', cut_key(), id)
if s.err or s[1] ~= state or s[2] ~= runs or s[3] then return 0 end
redis.call('HSET', job_key(id), 'record', record, 'summary', summary)
if s[5] and (s[6] or '') ~= '' then
  local ends = usage_span_end(tonumber(integer_text(s[4])) or 3600, now_ms())
  buffer_write(buffered_usage, s[5], 'r' .. ends, #record + #summary)
end
local model, priority = parse_lane(s[7])
local generated = parse_number(ARGV[6])
if model and generated then charge_rest(model, priority, s[5] or '', s[8], generated, 0) end
release_logs(id, runs)
return 1
