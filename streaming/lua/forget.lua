#!lua flags=allow-oom
-- Deletes the record of a file, or of a batch that has ended; a cursor may still name it.
-- ARGV: 'file' | 'batch', id, tenant
local kind, id, tenant = ARGV[1], ARGV[2], ARGV[3]
local time = redis.call('ZSCORE', kind == 'file' and files_key(tenant) or batches_key(tenant), id)
if time then keep_place(tenant, id, time) end
if kind == 'file' then
  redis.call('DEL', file_key(id))
  release_file_cost(id, tenant)
else
  redis.call('DEL', batch_key(id))
  redis.call('ZREM', batches_key(tenant), id)
  cancel_deletion(id, tenant)
end
return 1
