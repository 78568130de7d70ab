#!lua flags=allow-oom
-- What a worker found when it loaded a model. ARGV: model, card
redis.call('HSET', card_key(), ARGV[1], ARGV[2])
return 1
