-- Limits of keys and tenants: what each of them has used, and what its unfinished jobs have reserved of it.

-- The account of a key or a tenant is a MessagePack map. For `requests` and `tokens` it has a clock that gains the rate a ms
-- (`requests_clock`, `requests_rate`) and the theoretical arrival time of the next one on it (`requests_at`), by GCRA, the
-- generic cell rate algorithm (ATM Forum, Traffic Management 4.0, 4.4.2): a minute's worth may come at once. On such a clock
-- another rate, or a store whose time was set back, changes no debt. `tokens_returned`: all that ends gave back, which moves
-- every reservation behind forward. `seen`: when the account was last read. The rest: tokens and money of the day and the
-- month (UTC) in which a job was accepted.
local ACCOUNT = {'seen', 'requests_clock', 'requests_rate', 'requests_at', 'tokens_clock', 'tokens_rate', 'tokens_at',
  'tokens_returned', 'day', 'tokens_per_day', 'cost_per_day', 'month', 'tokens_per_month', 'cost_per_month'}
local ACCOUNT_EXPIRY_S = 40 * 86400
local MINUTE_MS = 60000
local DAY_MS = 86400000
local RATES = {'requests', 'tokens'}
local SPANS = {'day', 'month'}

-- Numbers the months by their days (from 1970-01-01), counted in years that begin in March, whose leap day is their last.
local function month_of(day)
  local since = day + 719468 -- days from 0000-03-01
  local era = math.floor(since / 146097)
  local rest = since - era * 146097
  local year = math.floor((rest - math.floor(rest / 1460) + math.floor(rest / 36524) - math.floor(rest / 146096)) / 365)
  local of_year = rest - 365 * year - math.floor(year / 4) + math.floor(year / 100)
  return 12 * (400 * era + year) + math.floor((5 * of_year + 2) / 153)
end

local function read_account(name)
  local _, found = pcall(cmsgpack.unpack, redis.pcall('GET', account_key(name)) or '')
  local account, now = {}, exact_ms()
  for _, field in ipairs(ACCOUNT) do account[field] = type(found) == 'table' and tonumber(found[field]) or 0 end
  for _, what in ipairs(RATES) do
    local clock, passed = what .. '_clock', math.max(0, now - account.seen)
    account[clock] = account[clock] + passed * account[what .. '_rate']
  end
  account.seen = now
  local day = math.floor(now / DAY_MS)
  local spans = {day = day, month = month_of(day)}
  for _, span in ipairs(SPANS) do
    local ahead = account[span] - spans[span]
    if ahead < 0 or ahead > 1 then -- a store whose time was set back a little does not give a budget twice
      account[span], account['tokens_per_' .. span], account['cost_per_' .. span] = spans[span], 0, 0
    end
  end
  return account
end

local function save_account(name, account)
  redis.call('SET', account_key(name), cmsgpack.pack(account), 'EX', ACCOUNT_EXPIRY_S)
end

-- How many unfinished jobs count in an account: all, or (`waits`) those whose clients wait. At the limit some are looked at:
-- one whose record has ended or is gone, which another version or a hand did, counts no more.
local function count_open(name, waits, most)
  local open = open_key(name)
  local count = redis.call('ZCOUNT', open, waits and 1 or 0, 1)
  if count < most then return count end
  for _, id in ipairs(redis.call('ZRANDMEMBER', open, 20)) do
    local state = redis.pcall('HGET', job_key(id), 'state')
    if state ~= 'queued' and state ~= 'in_progress' then redis.call('ZREM', open, id) end
  end
  return redis.call('ZCOUNT', open, waits and 1 or 0, 1)
end

-- Find the first limit of an account that a job would exceed. `want`: `tokens`, `cost`, `waits` (1: its client waits, else
-- 0) and `part` (a line of a batch). A line leaves half a minute's worth to other requests, unless it needs more itself.
-- Returns: nil | the limit's name, what is used of it (of a rate: nothing), ms until it may hold (0: not known; -1: never)
local function exceeded_limit(name, limits, account, want)
  for i, what in ipairs(RATES) do
    local rate, count = what .. '_per_minute', ({1, want.tokens})[i]
    local most, level = limits[rate], math.max(0, account[what .. '_at'] - account[what .. '_clock'])
    if most and count > most then return rate, 0, -1 end
    local above = most and level + count - (want.part and level > 0 and most / 2 or most) or 0
    if above > 0 then return rate, 0, math.ceil(above * MINUTE_MS / most) end
  end
  for _, each in ipairs({{'concurrent', true, want.waits}, {'queued', false, 1}}) do
    local limit, waits, more = unpack(each)
    local count = limits[limit] and more > 0 and count_open(name, waits, limits[limit]) or 0
    if count > 0 and count >= limits[limit] then return limit, count, 0 end
  end
  for _, span in ipairs(SPANS) do
    for _, what in ipairs({'tokens', 'cost'}) do
      local limit, more = what .. '_per_' .. span, want[what]
      local most, used = limits[limit], account[limit]
      if most and more > most then return limit, used, -1 end
      if most and more > 0 and used + more > most then
        local next_day = account.day + 1
        while span == 'month' and month_of(next_day) == account.month do next_day = next_day + 1 end
        return limit, used, math.max(1, next_day * DAY_MS - now_ms())
      end
    end
  end
end

-- What is left of the rates: of requests and of tokens the limit, how many may come at once and ms until all may, each of
-- the account that has least left; 0, 0, 0 without such a limit.
local function rates_left(accounts)
  local out = {0, 0, 0, 0, 0, 0}
  for i, what in ipairs(RATES) do
    for _, each in ipairs(accounts) do
      local most, account = each.limits[what .. '_per_minute'], each.account
      local level = math.max(0, account[what .. '_at'] - account[what .. '_clock'])
      local left = most and math.max(0, math.floor(most - level + 1e-6))
      if most and (out[3 * i - 2] == 0 or left < out[3 * i - 1]) then
        out[3 * i - 2], out[3 * i - 1], out[3 * i] = most, left, math.ceil(level * MINUTE_MS / most)
      end
    end
  end
  return out
end

-- Read the accounts that a job counts in. `given`: name and limits of each. A longest answer that is a guess (`want.guessed`)
-- reserves no more than the limits, which so let it in when nothing else is used.
-- Returns: the accounts, and the answer of `put` if one of their limits refuses the job.
local function open_accounts(given, want)
  local accounts, refusal = {}, nil
  for _, each in ipairs(want.guessed and given or {}) do
    for _, what in ipairs({'tokens', 'cost'}) do
      for _, span in ipairs({'minute', 'day', 'month'}) do
        want[what] = math.min(want[what], each[2][what .. '_per_' .. span] or math.huge)
      end
    end
  end
  for i, each in ipairs(given) do
    local account, limits = read_account(each[1]), each[2]
    accounts[i] = {name = each[1], limits = limits, account = account}
    for _, what in ipairs(RATES) do
      account[what .. '_rate'] = (limits[what .. '_per_minute'] or 0) / MINUTE_MS
      if not limits[what .. '_per_minute'] then account[what .. '_at'] = account[what .. '_clock'] end
    end
    local name, used, retry_ms = exceeded_limit(each[1], limits, account, want)
    if name and not refusal then refusal = {'limit', each[1], name, tostring(limits[name]), tostring(used), retry_ms} end
  end
  for _, number in ipairs(refusal and rates_left(accounts) or {}) do refusal[#refusal + 1] = number end
  return accounts, refusal
end

-- Reserve what an accepted job may use. Returns what its record has of it (`hold`).
local function reserve_limits(id, accounts, want)
  local hold = {tokens = want.tokens, cost = want.cost, input = want.input, output = want.output, accounts = {}}
  for i, each in ipairs(accounts) do
    local account = each.account
    account.requests_at = math.max(account.requests_at, account.requests_clock) + 1
    account.tokens_at = math.max(account.tokens_at, account.tokens_clock) + want.tokens
    for _, span in ipairs(SPANS) do
      account['tokens_per_' .. span] = account['tokens_per_' .. span] + want.tokens
      account['cost_per_' .. span] = account['cost_per_' .. span] + want.cost
      hold[span] = account[span]
    end
    hold.accounts[i] = {each.name, account.tokens_at + account.tokens_returned}
    save_account(each.name, account)
    redis.call('ZADD', open_key(each.name), want.waits, id)
    redis.call('EXPIRE', open_key(each.name), ACCOUNT_EXPIRY_S)
  end
  return cmsgpack.pack(hold)
end

-- Give back what a job holds of its limits. `ends`: its place among the unfinished ones. `prompt`, `generated`: the tokens
-- that it has used, and what it reserved beyond them; nil: that is not known yet.
-- A rate gets back only what time has not given back already: of its reservation, what was last to flow off. A debt, of a job
-- that used more than it reserved, is paid off within two minutes.
local function settle_limits(id, text, ends, prompt, generated)
  local read, hold = pcall(cmsgpack.unpack, text)
  if not read or type(hold) ~= 'table' or type(hold.accounts) ~= 'table' then return end
  for _, each in ipairs(hold.accounts) do
    local name, reserved_at = unpack(each)
    if ends then redis.call('ZREM', open_key(name), id) end
    if prompt then
      local account, more = read_account(name), prompt + generated - hold.tokens
      local cost = prompt * hold.input + generated * hold.output - hold.cost
      local clock = account.tokens_clock
      local unused = math.min(-more, reserved_at - account.tokens_returned - clock, account.tokens_at - clock)
      if unused > 0 then
        account.tokens_at, account.tokens_returned = account.tokens_at - unused, account.tokens_returned + unused
      end
      local most = clock + 2 * MINUTE_MS * account.tokens_rate
      if more > 0 then account.tokens_at = math.min(math.max(account.tokens_at, clock) + more, most) end
      for _, span in ipairs(SPANS) do
        local tokens_per, cost_per = 'tokens_per_' .. span, 'cost_per_' .. span
        if account[span] == hold[span] then
          account[tokens_per], account[cost_per] = math.max(0, account[tokens_per] + more), math.max(0, account[cost_per] + cost)
        end
      end
      save_account(name, account)
    end
  end
end
