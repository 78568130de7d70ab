#!lua flags=allow-oom
-- Stores the model card that a worker made when it loaded a model. ARGV: model, card
redis.call('HSET', card_key(), ARGV[1], ARGV[2])
return 1
