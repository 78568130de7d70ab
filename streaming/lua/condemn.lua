#!lua flags=allow-oom
-- Marks the store as unusable by any process (format 0), before `penstock store reset` deletes it. Runs in a full store
-- too. Returns 1
redis.call('HSET', store_key(), 'format', 0, 'partitions', 0, 'deployment', '')
return 1
