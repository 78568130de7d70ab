#!lua flags=allow-oom
-- Drop the record of a file or of a batch that has ended. ARGV: 'file' | 'batch', id, tenant
local kind, id, tenant = ARGV[1], ARGV[2], ARGV[3]
redis.call('DEL', kind == 'file' and file_key(id) or batch_key(id))
redis.call('ZREM', kind == 'file' and files_key(tenant) or batches_key(tenant), id)
if kind == 'file' then redis.call('HDEL', sizes_key(tenant), id) end
redis.call('ZREM', expiring_key(), id)
return 1
