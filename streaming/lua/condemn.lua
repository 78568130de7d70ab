#!lua flags=allow-oom
-- All of this store is about to be deleted: from now on no process may use it, for it names no format that there is. So
-- a full store can be emptied too. Returns 1
redis.call('HSET', store_key(), 'format', 0, 'partitions', 0, 'deployment', '')
return 1
