#!lua flags=no-writes
-- What is written about a job. ARGV: id
-- Returns: {the fields of its record and their values, the partition's epoch | nil}
return {redis.call('HGETALL', job_key(ARGV[1])), redis.call('GET', epoch_key())}
